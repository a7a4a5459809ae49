"""What runs and measures the HiCache extension: embedded engine, launcher, benchmarks, tools and the demo."""
