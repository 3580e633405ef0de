"""A fuzzer: numbered random configurations, each compared with a loop over samples in plain torch (`python -m
tests.fuzz -h`).
"""
