"""API keys, the tenants that own them, and which tenants share cached blocks.

Pure, except for `read_tenants`, which reads the keys file. `rate_limits.py` tracks the tenants' usage.

Without a keys file, every key is a separate tenant, and all callers without a key are one more. With a file, only its
keys are accepted. It contains sha256 digests, so reading it does not allow anyone to act as a tenant.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ...kvcache.hashing import canonical
from ..errors import KeysFileInvalid, MissingKey, UnknownKey
from ..strict_yaml import InvalidYamlError, parse_yaml
from .rate_limits import TenantLimits

Struct = TypeVar("Struct", bound=msgspec.Struct)
UNLIMITED = TenantLimits()
#: Name of the tenant whose key is the setting `api_key`.
OWN_TENANT = "api-key"
#: Length of a tenant's digest.
DIGEST_BYTES = 16
#: Salts of callers with a key, and of those who give a long one, are digests with this prefix.
SALT_PREFIX = "tenant-"
#: A longer `cache_salt` is replaced by a digest: the salt is sent with a chain's first block on the event stream.
MAX_PLAIN_SALT_CHARS = 128
#: Longer keys of unnamed tenants are not cached: a key can fill an HTTP head of 64 KiB, and thousands are cached.
MAX_CACHED_KEY_CHARS = 256
#: Digests are looked up by their first bytes, then compared in full in constant time.
_BUCKET_BYTES = 4


@dataclass(slots=True, frozen=True)
class Tenant:
    """A caller, the unit to which budgets and limits apply."""

    digest: bytes  #: 16 bytes; identifies the tenant where its name or key must not appear
    sharing: bytes  #: a digest; tenants with the same one share cached blocks; empty: callers without a key
    admin: bool  #: whether it may do what affects all tenants, such as resetting the caches
    name: str = ""  #: name in the keys file; empty without a file
    limits: TenantLimits = UNLIMITED

    @property
    def label(self) -> str:
        """The name for logs; for unnamed callers the start of their digest."""
        return self.name or self.digest[:4].hex()

    def cache_salt(self, narrowed_by: str | None) -> bytes:
        """The salt of the caller's requests, as UTF-8. Only equal salts share cached blocks; `narrowed_by` restricts
        further. It names the blocks on the event stream, so a caller without a key is known by what it sent.
        """
        given = narrowed_by or ""
        if not self.sharing and len(given) <= MAX_PLAIN_SALT_CHARS and not given.startswith(SALT_PREFIX):
            return given.encode()
        return SALT_PREFIX.encode() + _digest(b"homing-salt", self.sharing, given.encode()).hex().encode()


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key in the keys file."""

    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]  #: hex digest of the key's UTF-8 bytes
    tenant: Annotated[str, Meta(min_length=1)]
    group: Annotated[str, Meta(min_length=1)] | None = None  #: tenants of the same group share cached blocks
    admin: bool = False


class KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the keys file."""

    keys: list[KeyEntry]
    tenants: dict[str, Any] = {}  #: `TenantLimits`, converted individually: msgspec's errors do not name dict keys


class Tenants:
    """All accepted tenants."""

    def __init__(self, keys: KeysFile | None = None) -> None:
        """`keys` None: every key is a tenant and an admin. Raises KeysFileInvalid."""
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
        """The tenants in the keys file, without duplicates; empty without a file."""
        known = [tenant for bucket in (self._buckets or {}).values() for _, tenant in bucket]
        return list({tenant.digest: tenant for tenant in known}.values())

    def of(self, authorization: str | None) -> Tenant:
        """The tenant that owns the key in this header, decoded as Latin-1. Raises MissingKey or UnknownKey."""
        scheme, _, rest = (authorization or "").partition(" ")
        key = (rest if scheme.lower() == "bearer" else authorization or "").strip()
        if self._buckets is None:
            return _cached_unnamed(key) if len(key) <= MAX_CACHED_KEY_CHARS else _unnamed(key)
        if not key:
            raise MissingKey("this server requires an API key: send 'Authorization: Bearer KEY'")
        digest = sha256(key.encode("latin-1")).digest()
        for known, tenant in self._buckets.get(digest[:_BUCKET_BYTES], ()):
            if compare_digest(known, digest):
                return tenant
        raise UnknownKey(digest.hex())


def read_tenants(path: str, api_key: str = "") -> Tenants:
    """The tenants in a YAML file, plus the one with `api_key`; if both are empty, every key is a tenant.

    Raises KeysFileInvalid.
    """
    own = KeyEntry(key_sha256=sha256(api_key.encode()).hexdigest(), tenant=OWN_TENANT, admin=True) if api_key else None
    if not path:
        return Tenants(KeysFile(keys=[own]) if own else None)
    file = Path(path).expanduser()
    try:
        content = parse_yaml(file.read_bytes())
    except OSError as error:
        raise KeysFileInvalid(f"cannot read the keys file {file.absolute()}: {error.strerror}") from error
    except InvalidYamlError as error:
        raise KeysFileInvalid(f"the keys file {file} is not YAML: {error}") from error
    try:
        return tenants_of(content, own)
    except KeysFileInvalid as error:
        raise KeysFileInvalid(f"keys file {file}: {error.message}") from error


def tenants_of(content: Any, own: KeyEntry | None = None) -> Tenants:
    """The tenants in a keys file's content, plus those of `own`. Raises KeysFileInvalid, which names the entry."""
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


_cached_unnamed = lru_cache(4096)(_unnamed)


def _digest(*fields: bytes) -> bytes:
    return sha256(canonical(*fields)).digest()[:DIGEST_BYTES]
