"""A receiver of OTLP profiles over gRPC that answers what it is told, and prints what it got, a line of JSON for each request.

Usage: grpc_receiver.py ANSWERS [CERTIFICATE KEY CLIENT-CA]

ANSWERS: names of statuses for the first requests, separated by commas, and after a colon the milliseconds of RetryInfo; later
ones are accepted. Messages above 128 KiB are refused by gRPC itself.
"""

import json
import sys
import threading
from concurrent import futures

import grpc
from described import described
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as pb
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2_grpc as service

answers = [word for word in sys.argv[1].split(",") if word]
lock = threading.Lock()


def say(row):
    with lock:
        print(json.dumps(row), flush=True)


def field(number, value):
    """A field of a message, shorter than 128 bytes."""
    if isinstance(value, int):
        assert value < 1 << 31
        encoded = b""
        while value > 127:
            encoded += bytes([value & 127 | 128])
            value >>= 7
        return bytes([number << 3]) + encoded + bytes([value])
    return bytes([number << 3 | 2, len(value)]) + value


def retry_info(milliseconds):
    delay = field(1, milliseconds // 1000) + field(2, milliseconds % 1000 * 1_000_000)
    info = field(1, b"type.googleapis.com/google.rpc.RetryInfo") + field(2, field(1, delay))
    return field(1, 8) + field(3, info)


class Profiles(service.ProfilesServiceServicer):
    def Export(self, request, context):
        with lock:
            answer, *more = (answers.pop(0) if answers else "200").split(":")
        headers = dict(context.invocation_metadata())
        say({"answer": answer, "headers": headers} | described(request))
        if answer == "hang":
            context.add_callback(lambda: None)
            threading.Event().wait(30)
        if answer == "partial":
            response = pb.ExportProfilesServiceResponse()
            response.partial_success.rejected_profiles = 1
            response.partial_success.error_message = "one is too old"
            return response
        if answer != "200":
            if more:
                context.set_trailing_metadata([("grpc-status-details-bin", retry_info(int(more[0])))])
            context.abort(grpc.StatusCode[answer], "as told")
        return pb.ExportProfilesServiceResponse()


server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 128 << 10)])
service.add_ProfilesServiceServicer_to_server(Profiles(), server)
if len(sys.argv) > 2:
    certificate, key, ca = (open(path, "rb").read() for path in sys.argv[2:5])
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(key, certificate)], ca, True))
else:
    port = server.add_insecure_port("127.0.0.1:0")
server.start()
say({"port": port})
server.wait_for_termination()
