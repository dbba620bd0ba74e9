"""HTTP: the only package, besides `daemon.app`, that knows aiohttp."""
