"""Integrations with training libraries, one module each.

``import fp8rs`` imports none of these modules, and the libraries are not dependencies. Most
libraries need no integration, because they train a converted model like any other. See
docs/clients.
"""
