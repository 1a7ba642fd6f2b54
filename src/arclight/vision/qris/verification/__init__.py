"""Payment codes held against what is known of their places: does this code belong here?

`registry` reads a table of places and compares prints; `tampering` estimates whether a code was pasted over another;
`verifier` compares all of it with the payload and gives a verdict with its evidence; `report` shows verdicts as a page.
Open `verifier` first.
"""
