"""Makes the verifier of JWTs from the settings, and refuses settings that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.model.errors import InvalidArgument
from penstock.server.settings import Settings

if TYPE_CHECKING:
    from penstock.server.identity.jwt import JwtVerifier
    from penstock.server.identity.jwt_keys import JwtKeys

Jwt = tuple["JwtVerifier", "JwtKeys"]


def check_jwt_settings(settings: Settings) -> None:
    """Raises InvalidArgument if JWTs are configured in a way that cannot work."""
    if not settings.jwt_keys:
        if settings.jwt_issuer or settings.jwt_audience:
            raise InvalidArgument("jwt_issuer and jwt_audience need jwt_keys")
        return
    if not settings.access_control:
        raise InvalidArgument("jwt_keys needs access_control: without it nobody is asked who it is")
    if not settings.jwt_issuer or not settings.jwt_audience:
        raise InvalidArgument("jwt_keys needs jwt_issuer and jwt_audience")
    if not settings.jwt_algorithms or not settings.jwt_principal_claim:
        raise InvalidArgument("jwt_algorithms and jwt_principal_claim must not be empty")
    if "HS256" in settings.jwt_algorithms and len(settings.jwt_algorithms) > 1:
        raise InvalidArgument(
            "jwt_algorithms: HS256 must stand alone; with other algorithms beside it, a public key "
            "could be taken for the shared one"
        )


async def start_jwt(settings: Settings) -> Jwt | None:
    """Returns the verifier of JWTs and its keys, loaded; None if no JWTs are configured."""
    jwt = make_verifier(settings)
    if jwt is not None:
        await jwt[1].start()
    return jwt


def make_verifier(settings: Settings) -> Jwt | None:
    check_jwt_settings(settings)
    if not settings.jwt_keys:
        return None
    try:
        from penstock.server.identity.jwt import ClaimNames, JwtVerifier
        from penstock.server.identity.jwt_keys import HS256, JwtKeys
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"jwt_keys needs {error.name}, which is not installed; install it with: "
            "pip install 'penstock[jwt]'"
        ) from error
    keys = JwtKeys(
        settings.jwt_keys,
        is_shared=HS256 in settings.jwt_algorithms,
        refresh_ms=settings.jwt_refresh_ms,
    )
    verifier = JwtVerifier(
        keys,
        issuer=settings.jwt_issuer,
        audience=settings.jwt_audience,
        algorithms=settings.jwt_algorithms,
        leeway_ms=settings.jwt_leeway_ms,
        claims=ClaimNames(
            settings.jwt_principal_claim,
            settings.jwt_tenant_claim,
            settings.jwt_namespace_claim,
            settings.jwt_roles_claim,
            settings.jwt_admin_role,
        ),
    )
    return verifier, keys
