"""Attention as papers and users write it, one family a file; `tests.programs` gathers them."""
