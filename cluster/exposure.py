"""What a cluster opens to others by its settings, in words for who starts it. Pure; forbids nothing."""

import ipaddress

from .config import Settings


def exposures(settings: Settings) -> list[str]:
    """What strangers could do, each with its remedy."""
    router = settings.router
    if is_loopback(router.host):
        return []
    if not router.api_keys_file:
        return [
            f"whoever reaches {router.host}:{router.port} may ask, reset caches and see the cluster: "
            "give --api-keys-file, or keep --host on 127.0.0.1"
        ]
    if not router.tls_cert_file:
        return [
            f"API keys and prompts travel to {router.host} in clear text: give --tls-cert-file, "
            "unless a proxy in front encrypts"
        ]
    return []


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address. A name that is not localhost may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
