"""The benchmark suite: `python benchmarks/bench.py` measures, `python benchmarks/report.py` writes it up."""
