"""Who a request is from: API keys, the tenants that hold them, and which tenants share cached blocks.

Pure but for `read_tenants`, which reads the file. Knows no HTTP, and of limits what the file says; meter.py counts.

Without a file every key is a tenant of its own, and callers without a key are one more. With a file its keys are the
only ones. Keys stand in it as sha256 digests: who reads the file cannot ask in a tenant's name.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml
from msgspec import Meta

from ...kvcache.hashing import canonical
from ..errors import KeysFileInvalid, MissingKey, UnknownKey
from .rate_limits import TenantLimits

Entry = TypeVar("Entry", bound=msgspec.Struct)
_TOP_LEVEL = {"keys", "tenants"}
#: Bytes of a tenant's digest and of a cache salt.
DIGEST_BYTES = 16
UNLIMITED = TenantLimits()
#: Of a key that is anybody's: one in a head of 64 KiB is as long as that, and thousands are remembered.
REMEMBERED_CHARACTERS = 256
#: Digests are found by their first bytes and then compared whole, in constant time.
_BUCKET_BYTES = 4


@dataclass(slots=True, frozen=True)
class Tenant:
    """Whoever budgets and limits are counted for."""

    digest: bytes  #: 16 bytes; stands for the tenant wherever its name or key must not go
    sharing: bytes  #: a digest; tenants with equal ones share cached blocks; empty: callers without a key
    admin: bool  #: may do what concerns everybody, such as resetting the caches
    name: str = ""  #: as in the file; empty without one
    limits: TenantLimits = UNLIMITED

    @property
    def label(self) -> str:
        """For logs: its name, or what tells it apart from other callers."""
        return self.name or self.digest[:4].hex()

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


class KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the file."""

    keys: list[KeyEntry]
    tenants: dict[str, TenantLimits] = {}


class Tenants:
    """All tenants that may ask."""

    def __init__(self, keys: KeysFile | None = None) -> None:
        """None: whoever asks is a tenant by its key, and everybody is an admin. Raises KeysFileInvalid."""
        self._buckets = None if keys is None else _buckets(keys)

    def named(self) -> list[Tenant]:
        """The tenants of the file, each once; none without a file."""
        known = [tenant for bucket in (self._buckets or {}).values() for _, tenant in bucket]
        return list({tenant.digest: tenant for tenant in known}.values())

    def of(self, authorization: str | None) -> Tenant:
        """Who asks under this Authorization header. Raises MissingKey or UnknownKey."""
        key = (authorization or "").removeprefix("Bearer ").strip()
        if self._buckets is None:
            return _remembered(key) if len(key) <= REMEMBERED_CHARACTERS else _anybody(key)
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
    """The tenants of a file's content. Raises KeysFileInvalid, which names the entry."""
    if not isinstance(content, dict) or not isinstance(content.get("keys"), list) or set(content) - _TOP_LEVEL:
        raise KeysFileInvalid("the top level must map 'keys' to a list of entries, may map 'tenants', and nothing else")
    limits = content.get("tenants", {})
    if not isinstance(limits, dict):
        raise KeysFileInvalid("tenants: must map tenants' names to their limits")
    keys = [_converted(f"keys[{number}]", given, KeyEntry) for number, given in enumerate(content["keys"])]
    return Tenants(
        KeysFile(
            keys=keys,
            tenants={name: _converted(f"tenants.{name}", given, TenantLimits) for name, given in limits.items()},
        )
    )


def _converted(place: str, given: Any, kind: type[Entry]) -> Entry:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise KeysFileInvalid(f"{place}: {error}") from error


def _buckets(file: KeysFile) -> dict[bytes, list[tuple[bytes, Tenant]]]:
    _check_entries(file)
    buckets: dict[bytes, list[tuple[bytes, Tenant]]] = {}
    for entry in file.keys:
        digest = bytes.fromhex(entry.key_sha256)
        tenant = _tenant(entry, file.tenants.get(entry.tenant, UNLIMITED))
        buckets.setdefault(digest[:_BUCKET_BYTES], []).append((digest, tenant))
    return buckets


def _check_entries(file: KeysFile) -> None:
    keys: dict[str, int] = {}
    groups: dict[str, tuple[int, str | None]] = {}
    for number, entry in enumerate(file.keys):
        first = keys.setdefault(entry.key_sha256, number)
        if first != number:
            raise KeysFileInvalid(f"keys[{number}].key_sha256: the same key as keys[{first}]")
        earlier, group = groups.setdefault(entry.tenant, (number, entry.group))
        if group != entry.group:
            raise KeysFileInvalid(
                f"keys[{number}].group: {entry.group!r}, but tenant {entry.tenant!r} is in {group!r} by keys[{earlier}]"
            )
    if strangers := set(file.tenants) - set(groups):
        raise KeysFileInvalid(f"tenants.{min(strangers)}: no key has this tenant")


def _tenant(entry: KeyEntry, limits: TenantLimits) -> Tenant:
    own = _digest(b"tenant", entry.tenant.encode())
    sharing = own if entry.group is None else _digest(b"group", entry.group.encode())
    return Tenant(own, sharing, entry.admin, entry.tenant, limits)


def _anybody(key: str) -> Tenant:
    own = _digest(b"key", key.encode())
    return Tenant(own, own if key else b"", admin=True)


_remembered = lru_cache(4096)(_anybody)


def _digest(*fields: bytes) -> bytes:
    return sha256(canonical(*fields)).digest()[:DIGEST_BYTES]
