"""An endpoint that answers every call of SQS with one error, as AWS would: ElasticMQ takes any credentials."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REFUSED = {
    "InvalidClientTokenId": 403,
    "UnrecognizedClientException": 400,
    "SignatureDoesNotMatch": 403,
    "InvalidSignatureException": 400,
    "AccessDenied": 403,
    "AccessDeniedException": 400,
    "MissingAuthenticationToken": 403,
}
"""Codes of AWS that no time heals, with their HTTP status: its older and its newer names."""
PASSING = {"Throttling": 400, "RequestThrottled": 403, "ExpiredToken": 403, "ServiceUnavailable": 503}
"""Codes that the same call may not get later."""


@contextlib.contextmanager
def endpoint() -> Iterator[str]:
    """The address of such an endpoint; the error's code is the last part of the path."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusal)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Refusal(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        code = self.path.strip("/").rpartition("/")[2]
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = {"__type": f"com.amazon.coral.service#{code}", "message": "no"}
        body = json.dumps(answer).encode()
        self.send_response((REFUSED | PASSING)[code])
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_said: object) -> None:
        """Nothing: a test reads what the program says."""
