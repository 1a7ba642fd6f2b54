"""Prepare and run a server: an address to listen on, bounded requests, a certificate.

In: host, port, files of a certificate; out: a bound socket and uvicorn's protocol (`listening`, whose rules are in `protocol`), a running
server (`running`), checked or new certificates (`certificates`). ``serve`` and ``federated.transports`` call it. Open `listening` first.
"""
