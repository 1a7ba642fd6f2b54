"""Model families, one readable file each, and the zoo of their published sizes."""
