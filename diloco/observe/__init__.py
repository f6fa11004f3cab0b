"""What people and tools see of a run: events, history, live view, report, summary, metrics."""
