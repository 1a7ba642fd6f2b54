"""Payment payloads as text, both ways: `codec` parses and builds the typed `Payload`.

Text comes in; `tlv` cuts it into data objects, `rules` checks each of them by EMVCo's and the national standard, and `codec`
gives the payload, or every violation by tag and offset. Open `codec` first.
"""
