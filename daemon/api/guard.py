"""Who may call: Host and Origin allow-lists, keys. Decisions only; the middleware acts on them."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy

from daemon.config import split_key
from daemon.errors import BadRequest, Forbidden, Unauthorized
from daemon.fair_queue import CLASSES
from daemon.messages import Priority


def check_host(values: list[str], extra: Iterable[str], hostname: str | None = None) -> None:
    """Accept IP literals, localhost, this machine's names and the configured ones, with any port.

    A page that a stranger's DNS name points here still sends that name, so it is refused.

    Raises:
        BadRequest: none, or more than one Host header.
        Forbidden: any other name.
    """
    if len(values) != 1:
        raise BadRequest("There must be one Host header.")
    name = host_name(values[0])
    own = (hostname or socket.gethostname()).lower()
    allowed = {"localhost", own, f"{own}.local", *(entry.lower() for entry in extra)}
    if name not in allowed and not _is_address(name):
        raise Forbidden("This Host is not on the allow-list (http.allowed_hosts).")


def host_name(value: str) -> str:
    """The name of a Host header or of the end of an Origin, lower case, without port, brackets and last dot."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_origin(origin: str, host: str, allowed: Iterable[str]) -> None:
    """Accept the page's own origin and the configured ones.

    An entry is a scheme and a host, which any port matches, or a scheme alone ("app://"), which any host matches.

    Raises:
        Forbidden: any other, "null" too.
    """
    scheme, separator, rest = origin.lower().partition("://")
    if separator and scheme in ("http", "https") and rest == host.lower():
        return
    if separator and any(_matches(scheme, rest, entry.lower()) for entry in allowed):
        return
    raise Forbidden("This Origin is not on the allow-list (http.allowed_origins).")


def _matches(scheme: str, rest: str, entry: str) -> bool:
    entry_scheme, _, entry_rest = entry.partition("://")
    if scheme != entry_scheme:
        return False
    entry_rest = entry_rest.rstrip("/")
    if not entry_rest or rest == entry_rest:
        return True
    return urlsplit(f"//{entry_rest}").netloc == entry_rest and ":" not in entry_rest and host_name(rest) == entry_rest


class Key(NamedTuple):
    """A key that was sent: the first characters of its digest, and its class, where it has one."""

    name: str
    priority: Priority | None


class KeyRing:
    """The keys that clients may send, as digests, with their classes; none: no key is asked for."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on only these are good; of a key that is there with several classes the lowest counts."""
        found: dict[bytes, Priority | None] = {}
        for text in keys:
            priority, key = split_key(text)
            digest = hashlib.sha256(key.encode()).digest()
            given = [one for one in (priority, found.get(digest)) if one is not None]
            found[digest] = max(given, key=CLASSES.index, default=None)
        self._classes = found

    def check(self, headers: CIMultiDictProxy[str]) -> Key | None:
        """The key that was sent; None when no key is asked for.

        Raises:
            Unauthorized: none, or a wrong one.
        """
        if not self._classes:
            return None
        for sent in _sent_keys(headers):
            digest = hashlib.sha256(sent.encode("utf-8", "surrogateescape")).digest()
            matches = [hmac.compare_digest(digest, known) for known in self._classes]
            if any(matches):
                return Key(digest.hex()[:12], self._classes[digest])
        raise Unauthorized("A valid key is needed: Authorization: Bearer KEY, or x-api-key: KEY.")


def _sent_keys(headers: CIMultiDictProxy[str]) -> list[str]:
    keys = []
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        keys.append(value.strip())
    if "x-api-key" in headers:
        keys.append(headers["x-api-key"].strip())
    return keys
