"""The guard: the source's answer beside the adapted one, alarms, budgets, and a record of every decision."""
