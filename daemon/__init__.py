"""The hotset daemon: the service process and the engine child that it starts."""

__version__ = "0.1.0"
