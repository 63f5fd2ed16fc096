"""AWS calls through boto3 with Regauge errors. The first call imports boto3."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Self

from regauge.system.errors import (
    PreflightError,
    RegaugeError,
    SettingsError,
    TransientError,
    first_line,
)

CONNECT_SECONDS, READ_SECONDS, MAX_TRIES = 10, 60, 3
MISSING_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "SSOError",
    "TokenRetrievalError",
)
"""botocore exceptions for missing or unreadable credentials."""
CREDENTIAL_CODES = (
    "ExpiredToken",
    "InvalidClientTokenId",
    "InvalidSignature",
    "SignatureDoesNotMatch",
    "UnrecognizedClient",
    "AuthFailure",
)
"""Prefixes of AWS error codes for wrong or expired credentials."""
TRANSIENT_CODES = ("Throttl", "TooManyRequests", "RequestLimitExceeded", "ServiceUnavailable")
FIRST_SERVER_ERROR = 500
"""Lowest HTTP status code for a server failure."""
QUOTA_WORDS = ("limit", "quota", "exceed")


class AwsClient:
    """A client for one AWS service in one region."""

    def __init__(self, service: str, region: str, region_key: str) -> None:
        """Create a client; `region_key` is the setting with the region, for messages.

        Raises PreflightError without boto3, and SettingsError for a bad region.
        """
        try:
            import boto3
            import botocore.config
            import botocore.exceptions
        except ImportError:
            remedy = "pip install 'regauge[aws]'"
            problem = f"boto3 is not installed, and calls to AWS {service} need it"
            raise PreflightError(problem, remedy) from None
        self._service, self._region, self._region_key = service, region, region_key
        self._exceptions: ModuleType = botocore.exceptions
        config = botocore.config.Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"total_max_attempts": MAX_TRIES, "mode": "standard"},
        )
        try:
            self._client = boto3.client(service, region_name=region, config=config)
        except self._exceptions.BotoCoreError as error:
            raise self._convert(error, "connect") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def call(self, operation: str, **request: Any) -> dict[str, Any]:
        """Return the response of an operation, such as `describe_jobs`.

        Raises PreflightError if credentials are missing or rejected, and TransientError if the
        service is unreachable or busy. Raises SettingsError if it rejects the request.
        """
        try:
            response: dict[str, Any] = getattr(self._client, operation)(**request)
        except (self._exceptions.BotoCoreError, self._exceptions.ClientError) as error:
            raise self._convert(error, operation) from None
        return response

    def has_object(self, operation: str, missing: str, **request: Any) -> bool:
        """Return whether `find_object` finds the object."""
        return self.find_object(operation, missing, **request) is not None

    def find_object(self, operation: str, missing: str, **request: Any) -> dict[str, Any] | None:
        """Return an operation's response; None if its error code is `missing`.

        `missing` is the end of the code. Raises the same errors as `call` for other failures.
        """
        try:
            response: dict[str, Any] = getattr(self._client, operation)(**request)
        except (self._exceptions.BotoCoreError, self._exceptions.ClientError) as error:
            answer = getattr(error, "response", {}).get("Error", {})
            if str(answer.get("Code", "")).endswith(missing):
                return None
            raise self._convert(error, operation) from None
        return response

    def _convert(self, error: Exception, operation: str) -> RegaugeError:
        name = f"AWS {self._service} in {self._region}"
        message = first_line(error)
        if any(kind.__name__ in MISSING_CREDENTIALS for kind in type(error).__mro__):
            remedy = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            return PreflightError(f"AWS credentials are missing: {message}", remedy)
        if isinstance(error, self._exceptions.ClientError):
            return self._convert_answer(error, name, operation)
        if isinstance(error, self._exceptions.HTTPClientError | self._exceptions.ConnectionError):
            remedy = f"check the network and {self._region_key}, then try again"
            return TransientError(f"{name} is unreachable: {message}", remedy)
        problem = f"{name} cannot be called: {message}"
        return SettingsError(problem, f"check {self._region_key} and the other settings")

    def _convert_answer(self, error: Any, name: str, operation: str) -> RegaugeError:
        answer = error.response.get("Error", {})
        code = str(answer.get("Code", ""))
        message = f"{name}: {operation}: {first_line(answer.get('Message') or code)}"
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code.startswith(CREDENTIAL_CODES):
            return PreflightError(f"{message} ({code})", "renew the AWS credentials")
        if code.startswith("AccessDenied"):
            action = "".join(word.capitalize() for word in operation.split("_"))
            remedy = f"allow {self._service}:{action} for these credentials"
            return PreflightError(message, remedy)
        if code.startswith(TRANSIENT_CODES) or status >= FIRST_SERVER_ERROR:
            return TransientError(message, "try again later")
        if any(word in message.lower() for word in QUOTA_WORDS):
            return SettingsError(message, "request a higher quota, or remove what is unused")
        return SettingsError(message, "correct the setting that AWS names")
