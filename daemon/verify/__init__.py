"""Whether experts on a device give the numbers that upstream gives: what is computed, compared and accepted."""
