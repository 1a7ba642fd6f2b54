"""Parse and build payment payloads: text to the typed `Payload` of `codec`, and back.

Text comes in; `tlv` cuts it into data objects, `rules` checks each of them by EMVCo's and the national standard, and `codec`
gives the payload, or every violation by tag and offset. Open `codec` first.
"""
