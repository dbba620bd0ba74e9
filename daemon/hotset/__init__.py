"""Which experts belong into VRAM: the hot set's file, budgets, and the choice between them. Pure but for reading."""
