"""What finds ranks that come apart: same step, same data, same weights, same work; the watchdog."""
