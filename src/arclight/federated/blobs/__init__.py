"""Files named by the SHA-256 of their content: where tensors wait, travel and are verified."""

from arclight.federated.blobs.blob_store import BlobStore as BlobStore
