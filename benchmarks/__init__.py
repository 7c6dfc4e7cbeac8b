"""The speed and size of the program, measured: `python -m benchmarks --help`. Not part of what is installed."""
