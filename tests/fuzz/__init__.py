"""Random input for every parser of the broker: from fixed seeds in CI, for hours by hand."""
