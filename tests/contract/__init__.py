"""The numbered sentences of the queue contract, over HTTP, against a real broker process."""
