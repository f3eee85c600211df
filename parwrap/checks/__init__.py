"""The checks that find ranks that come apart: same step, same data, same weights, same work; and the watchdog."""
