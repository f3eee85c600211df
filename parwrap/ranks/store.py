"""What parwrap puts into a store that several nodes share: JSON with a signature. Nothing else in parwrap uses such a store.

A store on several nodes is a TCP port that others may reach. A value is never unpickled and never used as a path, its type is checked, and
the signature covers the key too. torch's own keys in the store are not signed, so the network must be trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from parwrap.errors import LaunchError

__all__ = ["SECRET", "SignedStore", "secret_of"]

SECRET = "PARWRAP_SECRET"
"""The variable with a text that only the nodes of a job know. Without it, signatures only find damaged values."""


def secret_of(environ: Mapping[str, str]) -> str:
    """The secret of this job; empty if none is set.

    >>> secret_of({"PARWRAP_SECRET": "s3cret"})
    's3cret'
    """
    return environ.get(SECRET, "")


class SignedStore:
    """A store of signed JSON values.

    Args:
        store: torch's store.
        prefix: what the keys begin with. The signature covers it: a value that was signed for another prefix is refused.
        secret: the secret of the job; by default that of the environment. Another job with the same secret accepts the values of this one.

    >>> from torch.distributed import HashStore
    >>> signed = SignedStore(HashStore(), "start 0", secret="s3cret")
    >>> signed.set("node of 1", ["gpu7", 2])
    >>> signed.get("node of 1", list)
    ['gpu7', 2]
    """

    def __init__(self, store: Any, prefix: str, secret: str | None = None) -> None:
        self._store, self._prefix = store, prefix
        self._secret = (secret_of(os.environ) if secret is None else secret).encode()

    def set(self, key: str, value: Any) -> None:
        """Write ``value``, which JSON can express, under ``key``."""
        self._store.set(self._full(key), self._signed(key, value))

    def set_first(self, key: str, value: Any) -> Any:
        """Write ``value`` unless ``key`` has a value already. Return the value in the store, which must have the same type."""
        found = self._store.compare_set(self._full(key), "", self._signed(key, value))
        return self._verified(key, found, type(value))

    def get(self, key: str, kind: type) -> Any:
        """Wait for the value of ``key`` and return it.

        Args:
            key: the key, without the prefix.
            kind: the type that the value must have: ``str``, ``int``, ``float``, ``bool``, ``list`` or ``dict``.

        Raises:
            LaunchError: the signature does not match, or the value has another type.
        """
        return self._verified(key, self._store.get(self._full(key)), kind)

    def delete(self, key: str) -> None:
        """Forget the value of ``key``."""
        self._store.delete_key(self._full(key))

    def has(self, *keys: str) -> bool:
        """Whether all ``keys`` have values, which are not verified."""
        return bool(self._store.check([self._full(key) for key in keys]))

    def clone(self) -> SignedStore:
        """The same store over another connection, for another thread."""
        return SignedStore(self._store.clone(), self._prefix, self._secret.decode())

    def _full(self, key: str) -> str:
        return f"parwrap/{self._prefix}/{key}"

    def _signed(self, key: str, value: Any) -> str:
        text = json.dumps(value)
        return f"{self._signature(key, text)} {text}"

    def _signature(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{self._full(key)}\n{text}".encode(), hashlib.sha256).hexdigest()

    def _verified(self, key: str, found: bytes, kind: type) -> Any:
        signature, _, text = found.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(signature.encode(), self._signature(key, text).encode()):
            raise LaunchError(
                f"the value of {key!r} in the store of the job has a wrong signature: another job or program writes into this store, or "
                f"the nodes have different secrets. Set {SECRET} to the same text on all nodes, and choose a port that no other job uses."
            )
        value = json.loads(text)
        if type(value) is not kind:
            raise LaunchError(
                f"the value of {key!r} in the store of the job is {type(value).__name__}, not {kind.__name__}: start the same version of "
                "parwrap on all nodes."
            )
        return value
