"""What is built on the library: command line, experiments, reports. Never imported by it."""
