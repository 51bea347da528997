"""API keys: which requests are let in, which tenants share a cache, and the errors for a wrong file."""

from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from homing.router.errors import KeysFileInvalid, MissingKey, UnknownKey
from homing.router.tenants.api_keys import (
    MAX_CACHED_KEY_CHARS,
    MAX_PLAIN_SALT_CHARS,
    SALT_PREFIX,
    Tenant,
    Tenants,
    _cached_unnamed,
    read_tenants,
    tenants_of,
)


def entry(key: str, tenant: str, **more: object) -> dict[str, object]:
    return {"key_sha256": sha256(key.encode()).hexdigest(), "tenant": tenant, **more}


def known(*entries: dict[str, object]) -> Tenants:
    return tenants_of({"keys": list(entries)})


def by(tenants: Tenants, key: str) -> Tenant:
    return tenants.of(f"Bearer {key}")


def test_without_a_file_each_key_is_a_tenant_and_strangers_are_one_more():
    """A laptop needs no file, but two keys still share no cache."""
    tenants = Tenants()
    ann, bob, nobody = by(tenants, "ann"), by(tenants, "bob"), tenants.of(None)

    assert len({ann.digest, bob.digest, nobody.digest}) == 3
    assert len({each.cache_salt(None) for each in (ann, bob, nobody)}) == 3
    assert nobody.cache_salt(None) == b""
    assert by(tenants, "ann") == ann


def test_salts_name_who_shares_and_cannot_be_forged():
    """They name blocks on the event stream: readable for callers without a key, as vLLM has it; digests for others."""
    tenants = Tenants()
    ann, nobody = by(tenants, "ann"), tenants.of(None)
    digest = ann.cache_salt(None).decode()
    salts = [
        *(ann.cache_salt(each) for each in (None, "x", digest)),
        *(nobody.cache_salt(each) for each in (None, "x", digest, "s" * 1000)),
    ]

    assert len(set(salts)) == len(salts)
    assert nobody.cache_salt("x") == b"x"
    assert digest.startswith(SALT_PREFIX)
    assert len(digest) == len(SALT_PREFIX) + 32
    assert max(map(len, salts)) <= MAX_PLAIN_SALT_CHARS


def test_long_keys_are_tenants_and_are_not_remembered():
    """A client that sends thousands of keys of maximum header length must not fill the router's memory."""
    tenants, long = Tenants(), "k" * (MAX_CACHED_KEY_CHARS + 1)
    before = _cached_unnamed.cache_info().currsize

    assert by(tenants, long) == by(tenants, long)
    assert by(tenants, long).digest != by(tenants, long + "k").digest
    assert _cached_unnamed.cache_info().currsize == before


def test_with_a_file_its_keys_are_the_only_ones():
    """A key that is not in the file belongs to no tenant."""
    tenants = known(entry("k1", "acme"))

    assert by(tenants, "k1").name == "acme"
    with pytest.raises(UnknownKey):
        by(tenants, "k2")
    with pytest.raises(MissingKey, match="Authorization"):
        tenants.of(None)


def test_the_scheme_has_any_case_and_the_key_any_bytes():
    """HTTP's names of schemes ignore case, and the file has the digest of the key's UTF-8 bytes."""
    tenants = known(entry("k1", "acme"), entry("schlüssel", "zeta"))

    assert tenants.of("bearer k1") == tenants.of("BEARER k1") == tenants.of("k1")
    assert by(tenants, "schlüssel".encode().decode("latin-1")).name == "zeta"
    with pytest.raises(MissingKey):
        tenants.of("Bearer")


def test_an_empty_file_lets_nobody_in():
    """A file that lost its keys must not open the server to everyone."""
    with pytest.raises(UnknownKey):
        by(known(), "k1")


def test_keys_of_a_tenant_are_one_account_and_share():
    """A tenant can rotate its keys without losing its cache."""
    tenants = known(entry("old", "acme"), entry("new", "acme"))

    assert by(tenants, "old") == by(tenants, "new")


def test_tenants_of_a_group_share_blocks_and_pay_for_themselves():
    """They share only the cache; each tenant has its own budgets."""
    tenants = known(entry("a", "ann", group="lab"), entry("b", "bob", group="lab"), entry("c", "lab"))
    ann, bob, other = (by(tenants, key) for key in "abc")

    assert ann.cache_salt(None) == bob.cache_salt(None) != other.cache_salt(None)
    assert ann.cache_salt("x") == bob.cache_salt("x") != ann.cache_salt(None)
    assert ann.digest != bob.digest


def test_a_tenant_has_its_limits_whatever_the_key():
    """Limits belong to the tenant and appear once in the file."""
    limits = {"ann": {"requests_per_minute": 60, "weight": 2}}
    tenants = tenants_of({"keys": [entry("a", "ann"), entry("b", "ann"), entry("c", "bob")], "tenants": limits})

    assert [by(tenants, key).limits.requests_per_minute for key in "abc"] == [60, 60, None]
    assert sorted((tenant.name, tenant.limits.weight) for tenant in tenants.named()) == [("ann", 2), ("bob", 1)]
    assert Tenants().named() == []


def test_a_digest_gives_nothing_away():
    """Digests are sent to replicas and kept in their accounts; keys must not be."""
    secret = by(Tenants(), "secret-key")

    assert len(secret.digest) == 16
    assert "secret-key" not in repr(secret)


def test_only_a_marked_key_is_an_admin_s():
    """Emptying the cache of every tenant must not be open to every tenant."""
    tenants = known(entry("a", "ann"), entry("r", "root", admin=True))

    assert (by(tenants, "a").admin, by(tenants, "r").admin, Tenants().of(None).admin) == (False, True, True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "top level"),
        ({"keys": [entry("a", "ann")], "key": 1}, "top level"),
        ({"keys": [entry("a", "ann")], "tenants": []}, "tenants: Expected object"),
        ({"keys": [entry("a", "ann")], "tenants": {"bob": {}}}, r"tenants\.bob: no key"),
        ({"keys": [entry("a", "ann")], "tenants": {"ann": {"requests": 1}}}, r"tenants\.ann: .*requests"),
        ({"keys": [entry("a", "ann")], "tenants": {"ann": {"weight": 0}}}, r"tenants\.ann\.weight: .*> 0"),
        ({"keys": [entry("a", "ann"), {"tenant": "bob"}]}, r"keys\[1\]: .*key_sha256"),
        ({"keys": [entry("a", "ann", colour="red")]}, r"keys\[0\]: .*colour"),
        ({"keys": [{"key_sha256": "secret", "tenant": "ann"}]}, r"keys\[0\]\.key_sha256: .*regex"),
        ({"keys": [entry("a", "ann"), entry("a", "bob")]}, r"keys\[1\]\.key_sha256: the same key as keys\[0\]"),
        ({"keys": [entry("a", "ann", group="x"), entry("b", "ann")]}, r"keys\[1\]\.group: None, .* keys\[0\]"),
    ],
)
def test_a_wrong_entry_is_named(content: object, said: str):
    """The error must tell the file's editor where to look."""
    with pytest.raises(KeysFileInvalid, match=said):
        tenants_of(content)


def test_a_file_is_read_and_named_when_wrong(tmp_path: Path):
    """The file is YAML, like the settings. An empty path means no file."""
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [entry("a", "ann")]}))
    assert by(read_tenants(str(path)), "a").name == "ann"
    assert read_tenants("").of(None).name == ""

    path.write_text("keys: [")
    for wrong in (path, tmp_path / "missing.yaml"):
        with pytest.raises(KeysFileInvalid, match=wrong.name):
            read_tenants(str(wrong))
    for text in ("keys: []\nkeys: []", "keys: !!int three", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(KeysFileInvalid, match=r"keys\.yaml is not YAML"):
            read_tenants(str(path))
    path.write_text("keys: [1]")
    with pytest.raises(KeysFileInvalid, match=r"keys.yaml: keys\[0\]"):
        read_tenants(str(path))


def test_a_digest_that_only_begins_like_a_known_one_is_unknown() -> None:
    """Keys are looked up by their first bytes, then compared whole in constant time: the lookup alone admits no one."""
    digest = sha256(b"secret").hexdigest()
    tenants = tenants_of(
        {"keys": [{"key_sha256": digest[:-2] + ("00" if digest[-2:] != "00" else "01"), "tenant": "a"}]}
    )

    with pytest.raises(UnknownKey):
        tenants.of("Bearer secret")


def test_one_key_needs_no_file(tmp_path: Path):
    """The single key is an admin's; together with a file, it is one more key."""
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [entry("a", "ann")]}))

    alone, beside = read_tenants("", "k"), read_tenants(str(path), "k")

    for tenants in (alone, beside):
        assert by(tenants, "k").admin
        with pytest.raises(UnknownKey):
            by(tenants, "other")
        with pytest.raises(MissingKey):
            tenants.of(None)
    assert by(beside, "a").name == "ann"
    assert by(beside, "a").cache_salt(None) != by(beside, "k").cache_salt(None)
