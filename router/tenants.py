"""Who a request is from: API keys, the tenants that hold them, and which tenants share cached blocks.

Pure but for `read_tenants`, which reads the file. Knows no HTTP; limits per tenant have their place in `Tenant`.

Without a file every key is a tenant of its own, and callers without a key are one more. With a file its keys are the
only ones. Keys stand in it as sha256 digests: who reads the file cannot ask in a tenant's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from ..kvcache.hashing import canonical
from .errors import KeysFileInvalid, MissingKey, UnknownKey

#: Bytes of a tenant's digest and of a cache salt.
DIGEST_BYTES = 16
#: Digests are found by their first bytes and then compared whole, in constant time.
_BUCKET_BYTES = 4


@dataclass(slots=True, frozen=True)
class Tenant:
    """Whoever budgets and limits are counted for."""

    digest: bytes  #: 16 bytes; stands for the tenant wherever its name or key must not go
    sharing: bytes  #: a digest; tenants with equal ones share cached blocks; empty: callers without a key
    admin: bool  #: may do what concerns everybody, such as resetting the caches
    name: str = ""  #: as in the file; empty without one

    def cache_salt(self, narrowed_by: str | None) -> bytes:
        """Requests share cached blocks only under equal salts. A caller can narrow its own further."""
        if not self.sharing and not narrowed_by:
            return b""
        return _digest(b"homing-salt", self.sharing, (narrowed_by or "").encode())


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file."""

    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]  #: hex, of the key's UTF-8 bytes
    tenant: Annotated[str, Meta(min_length=1)]
    group: Annotated[str, Meta(min_length=1)] | None = None  #: tenants of one group share cached blocks
    admin: bool = False


class Tenants:
    """All tenants that may ask."""

    def __init__(self, entries: Sequence[KeyEntry] | None = None) -> None:
        """None: whoever asks is a tenant by its key, and everybody is an admin. Raises KeysFileInvalid."""
        self._buckets: dict[bytes, list[tuple[bytes, Tenant]]] | None = None if entries is None else {}
        _check_entries(entries or ())
        for entry in entries or ():
            digest = bytes.fromhex(entry.key_sha256)
            assert self._buckets is not None
            self._buckets.setdefault(digest[:_BUCKET_BYTES], []).append((digest, _tenant(entry)))

    def of(self, authorization: str | None) -> Tenant:
        """Who asks under this Authorization header. Raises MissingKey or UnknownKey."""
        key = (authorization or "").removeprefix("Bearer ").strip()
        if self._buckets is None:
            return _anybody(key)
        if not key:
            raise MissingKey("this server wants an API key: send 'Authorization: Bearer KEY'")
        digest = sha256(key.encode()).digest()
        for known, tenant in self._buckets.get(digest[:_BUCKET_BYTES], ()):
            if compare_digest(known, digest):
                return tenant
        raise UnknownKey("this API key is not known here")


def read_tenants(path: str) -> Tenants:
    """The tenants of a YAML file; an empty path: no file, so whoever asks. Raises KeysFileInvalid."""
    if not path:
        return Tenants()
    file = Path(path).expanduser()
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise KeysFileInvalid(f"cannot read the keys file {file.absolute()}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KeysFileInvalid(f"the keys file {file} is no YAML: {error}") from error
    try:
        return tenants_of(content)
    except KeysFileInvalid as error:
        raise KeysFileInvalid(f"keys file {file}: {error.message}") from error


def tenants_of(content: Any) -> Tenants:
    """The tenants of a file's content: `{"keys": [entry, ...]}`. Raises KeysFileInvalid, which names the entry."""
    if not isinstance(content, dict) or set(content) != {"keys"} or not isinstance(content["keys"], list):
        raise KeysFileInvalid("the top level must map 'keys' to a list of entries, and nothing else")
    return Tenants([_entry(number, given) for number, given in enumerate(content["keys"])])


def _entry(number: int, given: Any) -> KeyEntry:
    try:
        return msgspec.convert(given, KeyEntry)
    except msgspec.ValidationError as error:
        raise KeysFileInvalid(f"keys[{number}]: {error}") from error


def _check_entries(entries: Sequence[KeyEntry]) -> None:
    keys: dict[str, int] = {}
    groups: dict[str, tuple[int, str | None]] = {}
    for number, entry in enumerate(entries):
        first = keys.setdefault(entry.key_sha256, number)
        if first != number:
            raise KeysFileInvalid(f"keys[{number}].key_sha256: the same key as keys[{first}]")
        earlier, group = groups.setdefault(entry.tenant, (number, entry.group))
        if group != entry.group:
            raise KeysFileInvalid(
                f"keys[{number}].group: {entry.group!r}, but tenant {entry.tenant!r} is in {group!r} by keys[{earlier}]"
            )


def _tenant(entry: KeyEntry) -> Tenant:
    own = _digest(b"tenant", entry.tenant.encode())
    sharing = own if entry.group is None else _digest(b"group", entry.group.encode())
    return Tenant(own, sharing, entry.admin, entry.tenant)


@lru_cache(4096)
def _anybody(key: str) -> Tenant:
    own = _digest(b"key", key.encode())
    return Tenant(own, own if key else b"", admin=True)


def _digest(*fields: bytes) -> bytes:
    return sha256(canonical(*fields)).digest()[:DIGEST_BYTES]
