"""Networks of timm and of transformers, a small one of each family, against brute force: `python -m benchmarks.zoo`."""
