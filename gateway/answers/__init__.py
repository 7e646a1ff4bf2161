"""One request's life, from its submission to the last byte of its answer, in each format."""
