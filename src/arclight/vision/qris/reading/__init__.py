"""Codes in photos: find, rectify, decode and classify them."""
