"""Certificates for one transfer: a temporary authority, which is not stored, and one certificate per node."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_MARGIN = datetime.timedelta(days=2)  # tolerated clock error of a node
_LONGEST = datetime.timedelta(days=30)  # longest transfer


def certificates(names: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Return `authority`, `certificate` and `key` by name, as PEM text."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("transfer", authority_key, "transfer", authority_key, authority=True)
    pem = _text(authority)
    found = {}
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, "transfer", authority_key, authority=False)
        form = serialization.PrivateFormat.PKCS8
        secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        found[name] = {"authority": pem, "certificate": _text(certificate), "key": secret.decode()}
    return found


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey, *, authority: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(_name(name)).issuer_name(_name(issuer))
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _MARGIN).not_valid_after(now + _LONGEST)
    builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(known, critical=False)
    return builder.add_extension(_usage(authority), critical=True).sign(signer, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:  # Python 3.13 rejects an authority without this extension
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
