"""Results of measurements, for people: tables, pictures, figures in documents, the page of them."""
