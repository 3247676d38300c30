"""Identity: who sends a request, and for how long that is known."""
