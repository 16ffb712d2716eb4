"""The test suite; a package so that examples and benchmarks can import the corpus."""
