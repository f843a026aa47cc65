"""What measurements have found, for people: tables, pictures, figures in documents, the page of them."""
