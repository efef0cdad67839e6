"""The meaning of a failed S3 request: worth a retry, an answer that the store expects, or a refusal with its remedy in one line."""

from __future__ import annotations

import errno
from typing import Any

from .store import KeyMissing


class Transient(ConnectionError):
    """The answer is not what was requested (short, or another range); a retry may help."""


class PreconditionFailed(FileExistsError):
    """A conditional request's condition does not hold (412)."""


class NotSupported(OSError, NotImplementedError):
    """The service does not know the request or one of its headers (501)."""


class UploadGone(OSError):
    """The multipart upload is no longer open: it was completed or aborted."""


class Cancelled(OSError):
    """Another part of the same operation failed."""


class Undecided(OSError):
    """The request was retried until the deadline; it is unknown whether one of the tries took effect."""


_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
RETRIED_CODES = {"SlowDown", "InternalError", "RequestTimeout", "ServiceUnavailable", "Throttling", "ThrottlingException", "BadDigest"}
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired")
_REMEDIES = {
    **dict.fromkeys(_EXPIRED, "the credentials have expired: renew them, or use a role that renews by itself"),
    "RequestTimeTooSkewed": "set this host's clock, since the service refuses wrongly dated requests",
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch"), "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
}
"""Remedies for refusals, by the service's code."""


def judge(error: BaseException, what: str, bucket: str, conflict_again: bool) -> OSError | None:
    """Classify an exception of s3fs: ``Transient`` is retried, another ``OSError`` is raised, ``None`` means a bug of ours.

    Args:
        what: description of the request for messages, such as ``"PUT s3://bucket/key"``.
        conflict_again: whether a 409 (conflict of two conditional requests) counts as transient.
    """
    from aiohttp import ClientError as BrokenTransfer
    from botocore import exceptions as b

    if isinstance(error.__cause__, b.ClientError):  # s3fs translates it, and the translation lacks the code
        return _judge_answer(error.__cause__.response, what, bucket, conflict_again)
    if isinstance(error, b.NoCredentialsError | b.PartialCredentialsError | b.TokenRetrievalError | b.ProfileNotFound):
        return PermissionError(
            errno.EACCES, f"{what}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile or role that has access"
        )
    if isinstance(error, b.SSLError) and "CERTIFICATE" in str(error).upper():
        return OSError(errno.EACCES, f"{what}: {error}; set AWS_CA_BUNDLE to the service's certificate authority")
    if isinstance(error, b.HTTPClientError) and "interpreter shutdown" in str(error):
        return OSError(errno.ESHUTDOWN, f"{what}: the interpreter is exiting and looks up no more hosts")
    if isinstance(
        error,
        b.HTTPClientError
        | b.ConnectionError
        | b.IncompleteReadError
        | b.ResponseStreamingError
        | b.CredentialRetrievalError
        | b.MetadataRetrievalError
        | BrokenTransfer,
    ):
        return Transient(errno.EIO, str(error) or type(error).__name__)
    if isinstance(error, ConnectionError | TimeoutError):
        return Transient(errno.EIO, error.strerror or str(error) or "timed out")
    if isinstance(error, b.BotoCoreError):
        return OSError(errno.EINVAL, f"{what}: {error}")
    return error if isinstance(error, OSError) else None


def _judge_answer(answer: dict[str, Any], what: str, bucket: str, conflict_again: bool) -> OSError:
    stated = answer.get("Error", {})
    code, text = str(stated.get("Code", "")), str(stated.get("Message", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{status} {code}" + (f" ({text})" if text and text != code else "")
    if code == "NoSuchBucket":
        return OSError(errno.ENOENT, f"bucket {bucket!r} does not exist; create it, since saves never do")
    if code == "NoSuchUpload":
        return UploadGone(errno.ENOENT, f"{what}: {said}")
    if status == 404:
        return KeyMissing(errno.ENOENT, "no such object", what)
    if status == 412:
        return PreconditionFailed(errno.EEXIST, f"{what}: {said}")
    if status == 501:
        return NotSupported(errno.ENOTSUP, f"{what}: {said}")
    if code in _REMEDIES:
        return PermissionError(errno.EACCES, f"{what}: {said}; {_REMEDIES[code]}")
    if status == 400 and code == "400":  # an answer to HEAD has no body
        return OSError(errno.EIO, f"{what}: 400 without a reason; often the credentials have expired, or the bucket is in another region")
    if status in (401, 403):
        return PermissionError(
            errno.EACCES,
            f"{what}: {said}; the credentials need s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload and "
            "ListBucketMultipartUploads here",
        )
    if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "301"):
        return OSError(errno.EINVAL, f"{what}: {said}; the bucket is in another region: set AWS_REGION or ?region=")
    if status == 409 and conflict_again or status in _RETRIED_STATUS or code in RETRIED_CODES:
        return Transient(errno.EIO, said)
    return OSError(errno.EIO, f"{what}: {said}")
