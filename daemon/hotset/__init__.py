"""Which experts belong into VRAM: hot set, traces, budgets, heat, and the choice between them. Pure but for files."""
