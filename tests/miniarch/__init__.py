"""Tiny models with random weights of every architecture with experts.

`table.MINIS` has them; `writer.write_minis(directory, minis, library)` writes them; `run.decode_all(paths, library)`
decodes with them. Other types of experts: `replace(MINIS["gpt-oss"], quants=all_of("F32"))`. Names and sizes of tensors
come from llama.cpp itself (`probe`), so a new architecture needs a row of metadata, no list of tensors.
"""
