"""Verify payment codes: does a code belong to the merchant at whose place it was found?

`registry` reads a table of places and compares prints; `tampering` estimates whether a code was pasted over another;
`verifier` compares all of it with the payload and gives a verdict with its evidence; `report` shows verdicts as a page.
``arclight scan`` (with a registry) and ``demo`` call these. Open `verifier` first.
"""
