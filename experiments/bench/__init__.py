"""The native engine against transformers' own, and where its time goes. `python -m experiments.bench`."""
