"""Store and transfer blobs: files of tensors, named by the SHA-256 of their content.

`blob_store.BlobStore` is what every store can do; `folder`, `object_store` and the HTTP client implement it. `manifest_io` writes tensors
into blobs and reads them back, `partial_blob` resumes a broken transfer, `transfer` copies from store to store.
"""

from arclight.federated.blobs.blob_store import BlobStore as BlobStore
