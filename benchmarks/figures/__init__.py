"""The figures, one module each: `measure(bench)` yields them. What each is and how it is taken stands in its module."""
