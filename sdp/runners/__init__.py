"""Work through stages: in this process, or on Ray Data with the same results."""
