"""Which plan a call gets, and why: rules, predictions, measured tables, files."""
