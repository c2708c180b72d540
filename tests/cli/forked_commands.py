"""Run `kv-pool` in forks of a process that has imported it, which saves the imports of each command.

Started by `kv_pool_command` with one end of a socket as its argument.
"""

import importlib
import json
import os
import socket
import sys

MAX_BYTES = 1 << 20


def serve(connection):
    """Fork for each request; return in the fork, and at the end of the connection exit."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, MAX_BYTES, 2)
        if not message:
            sys.exit()
        child = os.fork()
        if child == 0:
            connection.close()
            for stream, number in zip(streams, (1, 2), strict=True):
                os.dup2(stream, number)
                os.close(stream)
            become(**json.loads(message))
            return
        for stream in streams:
            os.close(stream)
        connection.send(child.to_bytes(8, "big"))
        _, status = os.waitpid(child, 0)
        connection.send(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def become(arguments, folder, environment):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["kv-pool", *arguments]


if __name__ == "__main__":
    from kv_pool.cli.main import main
    from kv_pool.cli.sub_commands import COMMANDS

    for module in COMMANDS.values():
        importlib.import_module(f"kv_pool.cli.{module}")
    serve(socket.socket(fileno=int(sys.argv[1])))
    main()
