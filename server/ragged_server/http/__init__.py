"""The HTTP side: from bytes on a connection to requests for the store, and back."""
