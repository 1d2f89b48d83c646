"""A receiver of OTLP profiles that answers what it is told, and prints what it got, a line of JSON for each request.

Usage: receiver.py ANSWERS [CERTIFICATE KEY [CLIENT-CA]]

ANSWERS: for the first requests, separated by commas; later ones are accepted. The variable RECEIVER_PORT has the port, if it matters.
"""

import gzip
import http.server
import json
import os
import ssl
import sys
import threading

from described import described
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as pb

answers = [word for word in sys.argv[1].split(",") if word]
lock = threading.Lock()


def say(row):
    with lock:
        print(json.dumps(row), flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        with lock:
            answer, *more = (answers.pop(0) if answers else "200").split(":")
        length = int(self.headers["content-length"] or 0)
        if answer == "close":
            self.rfile.read(length // 2)
            say({"answer": answer})
            self.close_connection = True
            return
        if self.headers["transfer-encoding"] == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        row = {"answer": answer, "path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}, "bytes": len(body)}
        if self.headers["content-type"] == "application/x-protobuf":
            row |= described(pb.ExportProfilesServiceRequest.FromString(body))
        say(row)
        if answer == "hang":
            # Until the client gives up.
            self.connection.recv(1)
            self.close_connection = True
        elif answer == "slow":
            self.connection.settimeout(0.02)
            try:
                for byte in b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000:
                    self.connection.sendall(bytes([byte]))
                    try:
                        if not self.connection.recv(1):
                            break
                    except TimeoutError:
                        pass
            except OSError:
                pass
            self.close_connection = True
        elif answer == "cut":
            self.connection.sendall(b"HTTP/1.1 503 Unavailable\r\ncontent-length: 100\r\n\r\nno")
            self.close_connection = True
        else:
            response = b""
            if answer == "partial":
                full = pb.ExportProfilesServiceResponse()
                full.partial_success.rejected_profiles = 1
                full.partial_success.error_message = "one is too old"
                response = full.SerializeToString()
                answer = "200"
            self.send_response(int(answer))
            if more:
                self.send_header("retry-after", more[0])
            self.send_header("content-length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """Clients that are killed, or do not trust us."""


server = Server(("127.0.0.1", int(os.environ.get("RECEIVER_PORT", "0"))), Handler)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2], sys.argv[3])
    if len(sys.argv) > 4:
        context.load_verify_locations(sys.argv[4])
        context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
say({"port": server.server_address[1]})
server.serve_forever()
