"""The engine child: one loop thread that owns the llama.cpp context."""
