"""API keys, the tenants that hold them, and which tenants share cached blocks.

Pure, except for `read_tenants`, which reads the file. `rate_limits.py` counts what tenants use.

Without a file every key is a tenant of its own, and callers without a key are one more. With a file only its keys are
accepted. It holds sha256 digests, so whoever reads it cannot make requests in a tenant's name.
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

Struct = TypeVar("Struct", bound=msgspec.Struct)
UNLIMITED = TenantLimits()
#: The tenant with the key of the setting `api_key`.
OWN_TENANT = "api-key"
#: Bytes of a tenant's digest and of a cache salt.
DIGEST_BYTES = 16
#: Longer keys of unnamed tenants are not cached: a key may fill an HTTP head of 64 KiB, and thousands are cached.
REMEMBERED_CHARACTERS = 256
#: Digests are found by their first bytes and then compared whole, in constant time.
_BUCKET_BYTES = 4


@dataclass(slots=True, frozen=True)
class Tenant:
    """A caller to whom budgets and limits apply."""

    digest: bytes  #: 16 bytes; stands for the tenant wherever its name or key must not appear
    sharing: bytes  #: a digest; tenants with equal ones share cached blocks; empty: callers without a key
    admin: bool  #: may do what affects all tenants, such as resetting the caches
    name: str = ""  #: as in the file; empty without one
    limits: TenantLimits = UNLIMITED

    @property
    def label(self) -> str:
        """For logs: the name, or what distinguishes an unnamed caller from others."""
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
    """The content of the file."""

    keys: list[KeyEntry]
    tenants: dict[str, Any] = {}  #: `TenantLimits`, converted one by one: msgspec's errors do not name keys of maps


class Tenants:
    """All tenants that are accepted."""

    def __init__(self, keys: KeysFile | None = None) -> None:
        """None: every key is a tenant, and all of them are admins. Raises KeysFileInvalid."""
        self._buckets: dict[bytes, list[tuple[bytes, Tenant]]] | None = None
        if keys is None:
            return
        _check_entries(keys)
        limits = {name: _converted(given, TenantLimits, f"tenants.{name}") for name, given in keys.tenants.items()}
        self._buckets = {}
        for entry in keys.keys:
            digest, own = bytes.fromhex(entry.key_sha256), _digest(b"tenant", entry.tenant.encode())
            sharing = own if entry.group is None else _digest(b"group", entry.group.encode())
            tenant = Tenant(own, sharing, entry.admin, entry.tenant, limits.get(entry.tenant, UNLIMITED))
            self._buckets.setdefault(digest[:_BUCKET_BYTES], []).append((digest, tenant))

    def named(self) -> list[Tenant]:
        """The tenants of the file, each once; none without a file."""
        known = [tenant for bucket in (self._buckets or {}).values() for _, tenant in bucket]
        return list({tenant.digest: tenant for tenant in known}.values())

    def of(self, authorization: str | None) -> Tenant:
        """The tenant with the key of this Authorization header. Raises MissingKey and UnknownKey."""
        key = (authorization or "").removeprefix("Bearer ").strip()
        if self._buckets is None:
            return _remembered(key) if len(key) <= REMEMBERED_CHARACTERS else _unnamed(key)
        if not key:
            raise MissingKey("this server requires an API key: send 'Authorization: Bearer KEY'")
        digest = sha256(key.encode()).digest()
        for known, tenant in self._buckets.get(digest[:_BUCKET_BYTES], ()):
            if compare_digest(known, digest):
                return tenant
        raise UnknownKey("this API key is unknown")


def read_tenants(path: str, api_key: str = "") -> Tenants:
    """The tenants of a YAML file, and the one with `api_key`; without either, every key is a tenant.

    Raises KeysFileInvalid.
    """
    own = KeyEntry(key_sha256=sha256(api_key.encode()).hexdigest(), tenant=OWN_TENANT, admin=True) if api_key else None
    if not path:
        return Tenants(KeysFile(keys=[own]) if own else None)
    file = Path(path).expanduser()
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise KeysFileInvalid(f"cannot read the keys file {file.absolute()}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KeysFileInvalid(f"the keys file {file} is not YAML: {error}") from error
    try:
        return tenants_of(content, own)
    except KeysFileInvalid as error:
        raise KeysFileInvalid(f"keys file {file}: {error.message}") from error


def tenants_of(content: Any, own: KeyEntry | None = None) -> Tenants:
    """The tenants of a file's content, and of one more key. Raises KeysFileInvalid, which names the entry."""
    keys = _converted(content, KeysFile, "")
    return Tenants(msgspec.structs.replace(keys, keys=[*keys.keys, own]) if own else keys)


def _converted(given: Any, kind: type[Struct], place: str) -> Struct:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).replace("`", "").partition(" - at $")
        raise KeysFileInvalid(f"{f'{place}{path}'.lstrip('.') or 'top level'}: {reason}") from error


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
                f"keys[{number}].group: {entry.group!r}, but keys[{earlier}] puts tenant {entry.tenant!r} in {group!r}"
            )
    if unused := set(file.tenants) - set(groups):
        raise KeysFileInvalid(f"tenants.{min(unused)}: no key has this tenant")


def _unnamed(key: str) -> Tenant:
    own = _digest(b"key", key.encode())
    return Tenant(own, own if key else b"", admin=True)


_remembered = lru_cache(4096)(_unnamed)


def _digest(*fields: bytes) -> bytes:
    return sha256(canonical(*fields)).digest()[:DIGEST_BYTES]
