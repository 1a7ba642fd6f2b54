"""Carry messages and blobs between nodes and server, in process or over HTTPS.

A node reaches its server through a `link.Link`: open that first. `http_client` is the node's end of HTTP; `http_server` the server's, with
`uploads` for blobs and `authentication` for sessions. `keys` makes and registers identities of nodes, `tls` checks certificates.
`server_process` runs a server that outlives the process that started it, `flower` lets Flower start server and nodes, `settings` is what
users may set.
"""
